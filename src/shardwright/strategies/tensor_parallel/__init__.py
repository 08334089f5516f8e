"""What the tensor-parallel strategies share: roles for every layer, where everything lies, forwards, prices."""

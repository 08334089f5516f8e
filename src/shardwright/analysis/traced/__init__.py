"""Traces a model's code with torch.fx, and finds layers in the trace: pairs of linears, convolutions, batch norms."""

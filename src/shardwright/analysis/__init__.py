"""How a user's model is understood before it is cut: its calls, chains of layers, costs."""

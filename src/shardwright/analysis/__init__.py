"""How a user's model is understood before it is cut: recorded runs, traced code, costs, random draws."""

"""Parameters, gradients and optimizer state at rest in flat slices; whole while something computes with them."""

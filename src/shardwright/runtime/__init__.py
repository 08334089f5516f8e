"""What every step runs, whatever its strategies: today the stack of wrappers around each module's forward."""

"""What the command modules share: settings, loading both sides, progress, exit codes."""

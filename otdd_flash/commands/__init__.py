"""The commands: settings, loading of data, progress, messages, exit codes and the work of each."""

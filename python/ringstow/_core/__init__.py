"""What every room uses: settings, errors, arguments, files, waits. Knows nothing of checkpoints."""

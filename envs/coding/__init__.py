"""Code repair on real packages: building tasks, the environment, judging, demonstrations."""

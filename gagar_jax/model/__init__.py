"""The policy: its layers, how they are sharded, and its cache. Nothing here knows about tasks or rewards."""

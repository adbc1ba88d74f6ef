"""What emulated servers tell of themselves under ``/metrics``: the names, labels and buckets of each engine, one file each."""

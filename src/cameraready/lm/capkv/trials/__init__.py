"""What the study runs: policies, contexts, one prefill for all of them, and the measurements."""

"""Post-training: fine-tuning objectives, and reinforcement learning with verifiers.

You post-train a language model with TRL or transformers and argue about the details that decide a run: which clip, which prompts, whose
credit, which loss. The methods of this room are losses, advantages and samplers that plug into those trainers through their public
hooks, and their studies judge them where the truth is known exactly.
"""

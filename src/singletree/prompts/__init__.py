"""Write prompts: conversations to token ids, and token ids to text."""

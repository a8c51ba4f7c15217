"""What a `config.json` of Hugging Face says: facts of its type, and features that are not modelled."""

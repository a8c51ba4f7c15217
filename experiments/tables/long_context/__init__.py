"""Tables on long contexts: stages that share out the tokens and heads of a sequence."""

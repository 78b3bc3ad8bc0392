"""A method of its own folder, as CONTRIBUTING.md says: a linear map between two embeddings."""

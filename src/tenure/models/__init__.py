"""Where models come from, and how an unmodified transformers model is made to use Tenure's cache."""

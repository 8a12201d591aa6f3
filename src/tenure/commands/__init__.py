"""What the commands of ``tenure`` do. ``tenure.cli`` declares them and imports the rest only when it runs."""

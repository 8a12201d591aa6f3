"""What a tool's output shows, from the call that asked for it or from its first line."""

from __future__ import annotations

import pytest

from tenure.planners.things import thing_shown, things_asked


@pytest.mark.parametrize(
    ("text", "things"),
    [
        (
            '<tool_call>\n{"name": "read_file", "arguments": {"path": "src/fees.py"}}\n</tool_call>',
            ["read src/fees.py"],
        ),
        ('{"name": "read_file", "arguments": "{\\"file_path\\": \\"a.py\\"}"}', ["read a.py"]),
        ('{"type": "function", "function": {"name": "view", "arguments": {"path": "a.py"}}}', ["read a.py"]),
        (
            '{"name": "view", "arguments": {"path": "a.py", "lines": [1, 50]}}',
            ['view {"lines": [1, 50], "path": "a.py"}'],
        ),
        ('{"name": "bash", "arguments": {"command": "cat ./a.py"}}', ["read a.py"]),
        ('{"name": "ls", "parameters": {}} {"name": "pwd", "parameters": {}}', ["ls {}", "pwd {}"]),
        ("Let me look.\n```bash\ncat  src/fees.py\n```", ["read src/fees.py"]),
        ("$ git status", ["run git status"]),
        ("```sh\n# first\ncd src\ncat a.py\n```", ["run cd src; cat a.py"]),
        ("$ cat 'broken", ["read 'broken"]),
        ("Nothing to run; { 'name': 1 } and {\"name\": broken", []),
        ('{"name": "x"}', []),
        ("", []),
    ],
)
def test_what_is_asked_for(text, things):
    assert things_asked(text) == things


@pytest.mark.parametrize(
    ("text", "thing"),
    [
        ("$ cat src/fees.py\nclass Fee:", "read src/fees.py"),
        ("=== src/fees.py ===\nclass Fee:", "read src/fees.py"),
        ("\n# file: src/fees.py\nx = 1", "read src/fees.py"),
        ('<document path="docs/a.md">\ntext', "read docs/a.md"),
        ("$ head -50 src/fees.py\n...", "run head -50 src/fees.py"),
        ("class Fee:\n    pass", None),
        ("The file fees.py has 3 lines", None),
        ("", None),
    ],
)
def test_what_is_shown(text, thing):
    assert thing_shown(text) == thing

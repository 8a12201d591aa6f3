"""What the doctor reads: three turns of a conversation, and code of the standard library."""

from __future__ import annotations

import inspect
import textwrap

CODE = inspect.getsource(textwrap)

TURNS = (
    (
        "Our nightly backup of the orders database has failed twice this week. The job starts at 02:10, "
        "dumps eleven schemas one after another, compresses each dump and copies it to the archive host. "
        "On Monday it stopped in schema number seven with the message 'could not extend file: no space "
        "left on device', although the disk showed 210 GB free in the evening. On Wednesday the dump "
        "itself was complete, but the copy ended after 38 minutes with 'connection reset by peer'. Nobody"
        " has changed the script since March. The database has grown from 140 GB to 180 GB in that time. "
        "Which causes should I look at first, and in which order?",
        "Look at the temporary space first. A dump that is compressed after it was written needs room for"
        " the plain and the packed copy at once: with 180 GB of data, the largest schemas may well pass "
        "210 GB for some minutes, and in the evening none of that is visible. Measure the free space once"
        " a minute during the next run, and write the compressed stream directly, so that the plain copy "
        "never exists. The second failure is of another kind. A reset after 38 minutes of copying points "
        "at a limit of idle or total time in a firewall, or at a restart of the service on the archive "
        "host: compare its log with the minute of the failure. I would do it in this order: log the "
        "space, stream the compression, then read the archive's log before changing any timeout.",
    ),
    (
        "I followed your advice. The log shows that free space fell from 205 GB to 3 GB while schema "
        "seven was being packed, so the first guess was right; the script now pipes the dump through the "
        "compressor and the run needs no more than 52 GB. On the archive host I found this line at the "
        "minute of the second failure: 'session closed: maximum lifetime of 2400 s reached'. Copying "
        "takes longer since the data has grown. Should I raise that limit, split the archive into parts, "
        "or copy several schemas at the same time?",
        "Split the archive, and leave the limit alone. A limit that is raised today is reached again when"
        " the data has grown by another third, and an interrupted copy of one large file starts from its "
        "beginning. Parts of about 4 GB each take less than two minutes, can be checked by themselves and"
        " sent again alone. Copying in parallel shortens the run only if the network is not the "
        "bottleneck; at 38 minutes for some 50 GB you move about 22 MB a second, which looks like a slow "
        "disk or a shared line rather than a full gigabit. Keep a list of the parts with their sizes and "
        "sha256 sums, write it last, and let the restore begin with reading that list.",
    ),
    (
        "Good, we will do that. Please write me a short checklist for the colleague who is on duty this "
        "weekend. She knows Linux well but has never seen this job. It should say how she notices that a "
        "run has failed, what she looks at first, which commands are safe to repeat, and when she should "
        "call me. Keep it to ten lines.",
        "",
    ),
)
"""Questions and answers of three turns; the last question is left open."""

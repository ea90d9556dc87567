"""Files behind URLs: s3://, gs://, az://, hf://, http:// and https://, through fsspec. Nothing else knows about it.

address.py  what is a URL, and its parts
remote.py   requests: repeated when they fail, never accepted when they are short, and failures in words
cache.py    whole files on this machine's disk, of bounded size, safe between processes
folders.py  what lies below a URL: listed once; folders that were published, by their manifest
publish.py  a folder of this machine published at a URL: objects, verified, then the manifest
"""

from vitkit.storage.address import above, is_url, is_web, join, last_name, named_in, plain, suffix
from vitkit.storage.cache import file_size, known_stat, local, open_regular, prefetch, stamp
from vitkit.storage.folders import (
    RemoteFolder,
    absent,
    beside,
    exists,
    fetched_folder,
    fetched_with,
    listing,
    search_above,
)
from vitkit.storage.publish import Publisher, output_file, workplace
from vitkit.storage.remote import Stat, repeated, stat

__all__ = ["Publisher", "RemoteFolder", "Stat", "above", "absent", "beside", "exists", "fetched_folder"]
__all__ += ["fetched_with", "file_size", "is_url", "is_web", "join", "known_stat", "last_name", "listing", "local"]
__all__ += ["named_in", "open_regular", "output_file", "plain", "prefetch", "repeated", "search_above", "stamp"]
__all__ += ["stat", "suffix", "workplace"]

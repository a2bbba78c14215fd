"""What a model might execute to read a file, a folder or a process that is none of its business.

    with secrets(folder) as (before, marks):
        box.run("execute", [[before + code] for code in ATTACKS.values()])  # no mark is in any result

Each code sets `result`. It has these names: `folder` with all the files, `secret` (a text), `link` to it, `inside` (a file that may be
read), `pid` and `address` (of this process and of a text in its memory), `keeper`.
"""

import os
import socket
import sqlite3
import zipfile
from contextlib import closing, contextmanager
from pathlib import Path

FILES = {
    "open": "result = open(secret).read()",
    "a relative path": "result = open(secret[1:]).read()",
    "dots behind a folder of Python": "result = open(os.path.dirname(inside) + '/..' * 20 + secret).read()",
    "dots behind a link of Python": "result = open('/usr/lib/ssl/certs/../../..' + secret).read()",
    "two slashes": "result = open('/' + secret).read()",
    "a link": "result = open(link).read()",
    "a link to the folder": "result = open(os.path.join(link + 's', 'secret.txt')).read()",
    "/proc/self/root": "result = open('/proc/self/root' + secret).read()",
    "/proc/self/cwd": "result = open('/proc/self/cwd' + secret).read()",
    "os.open": "result = os.read(os.open(secret, os.O_RDONLY), 100)",
    "os.open in a folder": "result = os.read(os.open('secret.txt', 0, dir_fd=os.open(folder, 0)), 100)",
    "os.open in the root": "result = os.read(os.open(secret[1:], 0, dir_fd=os.open('/', 0)), 100)",
    "os.open out of a folder": "d = os.open(os.path.dirname(inside), 0)\nresult = os.read(os.open('../' * 20 + secret, 0, dir_fd=d), 100)",
    "os.chdir": "os.chdir(folder)\nresult = open('secret.txt').read()",
    "/proc/self/fd": "result = open(f'/proc/self/fd/{os.open(secret, os.O_PATH)}').read()",
    "the number of a file": "result = open(os.open(secret, 0)).read()",
    "bytes": "result = open(secret.encode()).read()",
    "a path that changes": "class P:\n n = 0\n def __fspath__(self):\n  P.n += 1\n  return secret if P.n % 2 else inside\nfor _ in 'ab':\n try: result += str(io.FileIO(P()).read(99))\n except OSError: pass",
    "a text that lies": "class S(str):\n __format__ = __str__ = __add__ = lambda *_: inside\n startswith = lambda *_: True\n __contains__ = lambda *_: False\nresult = open(S(secret)).read()",
    "another builtin str": "import builtins as b\nold = b.str, b.type\nclass S(str):\n __format__ = lambda *_: inside\n __contains__ = lambda *_: False\nb.str = b.type = S\ntry: result = open(S(secret)).read()\nfinally: b.str, b.type = old",
    "the hook's variables": "try: open(secret)\nexcept PermissionError as error:\n f = error.__traceback__.tb_next.tb_frame\n f.f_locals['folders'] = ('/',)\n f.f_globals['type'] = lambda x: x.__class__\nresult = open(secret).read()",
    "the hook's module": "try:\n import snug.sandbox.confine as c, snug.sandbox.linux as s\n c.readable = lambda: ('/',); s.WRITING = 0; c.make_hook = print; c.HARMLESS = {'open'}\nexcept ImportError: pass\nresult = open(secret).read()",
    "FileIO": "result = io.FileIO(secret).read()",
    "open_code": "result = io.open_code(secret).read()",
    "an opener": "result = open(inside, opener=lambda *_: os.open(secret, 0)).read()",
    "a thread": "import threading\nout = []\nt = threading.Thread(target=lambda: out.append(open(secret).read()))\nt.start(); t.join()\nresult = out",
    "mmap": "import mmap\nresult = mmap.mmap(os.open(secret, 0), 0, prot=mmap.PROT_READ)[:]",
    "sendfile": "r, w = os.pipe()\nos.sendfile(w, os.open(secret, 0), 0, 100)\nresult = os.read(r, 100)",
    # the library
    "pathlib": "import pathlib\nresult = pathlib.Path(secret).read_text()",
    "sqlite3": "import sqlite3\nresult = list(sqlite3.connect(f'file:{folder}/secret.db?mode=ro&immutable=1', uri=True).execute('select * from t'))",
    "a pickle that opens": "import pickle\nclass A:\n __reduce__ = lambda _: (open, (secret,))\nresult = pickle.loads(pickle.dumps(A())).read()",
    "sys.path": "sys.path.append(folder)\nimport secrets_of\nresult = secrets_of.ANSWER",
    "a spec": "from importlib.util import *\ns = spec_from_file_location('m', folder + '/secrets_of.py')\nm = module_from_spec(s)\ns.loader.exec_module(m)\nresult = m.ANSWER",
    "get_data": "from importlib.machinery import SourceFileLoader\nresult = SourceFileLoader('m', secret).get_data(secret)",
    "zipimport": "sys.path.append(folder + '/secret.zip')\nimport zipped\nresult = zipped.ANSWER",
    "a traceback": "import traceback\ntry: exec(compile('1/0', secret, 'exec'))\nexcept ZeroDivisionError: result = traceback.format_exc()",
    "a syntax error": "try: compile('return', secret, 'exec')\nexcept SyntaxError as error: result = error.text",
    # names in a folder
    "os.listdir": "result = os.listdir(folder)",
    "os.listdir of a number": "result = os.listdir(os.open(folder, 0))",
    "os.scandir": "result = [entry.name for entry in os.scandir(folder)]",
    "an importer": "from importlib.machinery import FileFinder, SourceFileLoader\nf = FileFinder(folder, (SourceFileLoader, ['.py']))\nf.find_spec('x')\nresult = f._path_cache",
    # other processes and functions of C
    "a program": "import subprocess\nresult = subprocess.run(['/bin/cat', secret], capture_output=True).stdout",
    "a shell": "result = os.popen(f'cat {secret}').read()",
    "a fork": "r, w = os.pipe()\nif os.fork() == 0:\n os.write(w, open(secret, 'rb').read())\n os._exit(0)\nresult = os.read(r, 100)",
    "a socket": "import socket\nsocket.socket(socket.AF_UNIX).connect(folder + '/socket')\nresult = 'connected'",
    "a function of C": "import ctypes\nlibc = ctypes.CDLL(None)\nresult = os.read(libc.open(secret.encode(), 0), 100)",
    "a function of the sandbox": "try: from snug.sandbox import linux\nexcept ImportError: import ctypes as linux; linux.called = lambda *a: linux.CDLL(None).open(*a[1:])\nresult = os.read(linux.called('open', secret.encode(), 0), 100)",
}
ALWAYS = {  # the kernel refuses these without any layer: the processes are not dumpable
    "the keeper's root": "result = open(f'/proc/{keeper}/root' + secret).read()",
    "environ": "result = open(f'/proc/{pid}/environ').read()",
    "environ of the keeper": "result = open(f'/proc/{keeper}/environ').read()",
    "maps": "result = open(f'/proc/{pid}/maps').read()",
    "mem": "f = open(f'/proc/{pid}/mem', 'rb', 0)\nf.seek(address)\nresult = f.read(100)",
    "mem of the keeper": "f = open(f'/proc/{keeper}/mem', 'rb', 0)\nresult = open(f'/proc/{keeper}/maps').read()",
    "cwd": "result = os.readlink(f'/proc/{pid}/cwd') + '[cwd]'",
    "root": "result = open(f'/proc/{pid}/root{secret}').read()",
    "open files": "for n in range(3, 100):\n try: result = f'{result}{os.pread(n, 100, 0)}'\n except OSError: pass",
}
PROC = {  # what /proc has for everybody
    "status": "result = open(f'/proc/{pid}/status').read()",
    "status by way of stat": "open(f'/proc/{os.getppid()}/stat')\nresult = 'TracerPid'",
    "cmdline": "result = open(f'/proc/{pid}/cmdline').read() and '[cmdline]'",
    "files": "result = os.listdir(f'/proc/{pid}/fd')[0] + '[fd]'", "processes": "result = os.listdir('/proc')",
}  # fmt: skip
MISSED = {  # C code opens the file, and Python announces nothing
    "readline": "import readline\nreadline.read_history_file(secret)\nresult = readline.get_history_item(1)",
    "Tcl": "import _tkinter\nresult = _tkinter.create(None, 'a', 'A', False, False, False).eval(f'read [open {secret}]')",
    "Rust": "from tokenizers.models import WordLevel\nresult = WordLevel.read_file(folder + '/secret.json')",
    "shared memory": "import _posixshmem\nresult = os.read(_posixshmem.shm_open(shared, os.O_RDONLY, 0), 100)",
    "certificates": "import ssl\nc = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)\nc.load_verify_locations('/etc/ssl/certs/ca-certificates.crt')\nresult = c.get_ca_certs()[0]",
    "a program that is not announced": "import subprocess\nsys.audit = lambda *_: None\nresult = subprocess.run(['/bin/cat', secret], capture_output=True).stdout",
}
ATTACKS = FILES | ALWAYS | PROC | MISSED
ELSEWHERE = MISSED.keys() | {"dots behind a link of Python", "files"}  # a module, a link or a right of root

ANSWER, HEAP, HIDDEN = "the-answer-is-42", "only-in-memory", "a-name-that-no-code-has"


@contextmanager
def secrets(folder: Path, keeper: int):
    """Make the files -> (code that gives the attacks their names, what must be in no result)."""
    for name, text in {
        "secret.txt": f"{ANSWER}\n", "secrets_of.py": f"ANSWER = {ANSWER!r}", "secret.json": f'{{"{ANSWER}": 1}}',
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    with zipfile.ZipFile(folder / "secret.zip", "w") as file:
        file.writestr("zipped.py", f"ANSWER = {ANSWER!r}")
    with closing(sqlite3.connect(folder / "secret.db")) as file, file:
        file.execute("create table t as select ? as a", [ANSWER])
    (folder / HIDDEN).touch()
    (folder / "link").symlink_to(folder / "secret.txt")
    (folder / "links").symlink_to(folder)
    shared, heap = Path(f"/dev/shm/attack-{os.getpid()}"), f"{HEAP}{os.getpid()}".encode()
    names = dict(folder=str(folder), secret=f"{folder}/secret.txt", link=f"{folder}/link", inside=os.__file__)
    names |= dict(pid=os.getpid(), keeper=keeper, address=id(heap), shared=f"/{shared.name}", result="")
    before = "import io, os, sys\n" + "".join(f"{name} = {value!r}\n" for name, value in names.items())
    marks = [ANSWER, HEAP, HIDDEN, "PATH=", "[stack]", "[cwd]", "[fd]", "[cmdline]", "TracerPid", "'self'"]
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(f"{folder}/socket")
        server.listen(100)
        shared.write_text(ANSWER)
        try:
            yield before, [*marks, "connected", "commonName"]
        finally:
            shared.unlink()

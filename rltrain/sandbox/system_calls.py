"""System calls missing in Python's library, and the filter of system calls for sandboxed programs."""

import ctypes
import errno
import os
import struct

# Linux system calls missing in Python's library, for processes with one thread. Failures raise OSError.

NEW_NAMESPACES = {
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "network": 0x40000000,
    "mount": 0x00020000,
}
"""Flags of clone(2)."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

NUMBERS = {
    "x86_64": {"clone": 56, "capset": 126, "pivot_root": 155, "mount_setattr": 442},
    "aarch64": {"clone": 220, "capset": 91, "pivot_root": 41, "mount_setattr": 442},
}
SIGCHLD = 17
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
CAPABILITIES_VERSION_3 = 0x20080522

# PyDLL keeps the interpreter's lock, so a child made by `clone` holds it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def _checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(name: str, *arguments: object) -> int:
    numbers = NUMBERS.get(os.uname().machine, {})
    if name not in numbers:
        raise OSError(f"{name}: no number is known for processors of type {os.uname().machine}")
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _checked(_libc.syscall(ctypes.c_long(numbers[name]), *words), name)


def clone(namespaces: list[str]) -> int:
    """Forks into new namespaces. Returns 0 in the child."""
    flags = sum(NEW_NAMESPACES[name] for name in namespaces)
    return _call("clone", flags | SIGCHLD, 0, 0, 0, 0)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), data.encode() if data is not None else None)
    _checked(result, f"mount of {source or kind} on {target}")


def make_read_only(target: str) -> None:
    """Makes a mount and all mounts below it read-only, without set-user-id and devices."""
    attributes = _MountAttributes(set=MS_RDONLY | MS_NOSUID | MS_NODEV)
    _call(
        "mount_setattr",
        AT_FDCWD,
        ctypes.c_char_p(target.encode()),
        AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def unmount(target: str) -> None:
    """Unmounts the target and all mounts below it, even if they are in use."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount of {target}")


def pivot_root(new_root: str, place_of_old: str) -> None:
    _call("pivot_root", ctypes.c_char_p(new_root.encode()), ctypes.c_char_p(place_of_old.encode()))


def set_hostname(name: str) -> None:
    _checked(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def join_namespace(path: str) -> None:
    """Moves the calling thread into a namespace of another process, given as /proc/PID/ns/KIND. Raises OSError if the
    kernel refuses."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(descriptor, 0), f"setns to {path}")
    finally:
        os.close(descriptor)


def process_control(option: int, *arguments: object) -> None:
    words = [ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    _checked(_libc.prctl(option, *words), f"prctl({option})")


def drop_bounding_capabilities() -> None:
    """Prevents programs executed by this process from gaining capabilities. Needs CAP_SETPCAP."""
    for capability in range(64):
        try:
            process_control(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:  # after the kernel's last capability
                return
            raise


def drop_capabilities() -> None:
    process_control(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = _CapabilityHeader(version=CAPABILITIES_VERSION_3, pid=0)
    none_of_them = (ctypes.c_uint32 * 6)()
    _call("capset", ctypes.byref(header), ctypes.byref(none_of_them))


# The filter of system calls, a program of the kernel's packet filter (BPF).

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
"""The bit of x86-64's second table of system calls. Without it the filter would miss them."""

DENIED: dict[str, tuple[int, int]] = {
    # memory and descriptors of other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # large parts of the kernel with a history of bugs
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "personality": (135, 92),
    # memory outside of mappings and of sized file systems, so that it is not counted
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "uselib": (134, -1),
    "sysfs": (139, -1),
}
"""Maps a name to its numbers on x86_64 and aarch64 (-1: none). These calls fail with EPERM."""

LOOKED_AT = {"clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "ioctl": (16, 29)}
"""Calls filtered by their arguments. clone3 is refused, because a filter cannot see its arguments. Libraries then use
clone."""

UNIX, INET, INET6 = 1, 2, 10
"""Families of sockets."""
TERMINAL_INPUT, TERMINAL_SELECTION = 0x5412, 0x541C
"""Requests to ioctl (TIOCSTI, TIOCLINUX) that type on the terminal as another user."""

LOAD, JUMP_IF_EQUAL, JUMP_IF_GREATER_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""

Instruction = tuple[int, int, int, int]
"""(operation, instructions to skip if the test holds, instructions to skip if not, operand)."""


def program(machine: str, internet_sockets: bool) -> list[Instruction]:
    """Returns the filter for processors of type `machine`. Internet sockets are only safe inside a network
    namespace."""
    column = list(ARCHITECTURES).index(machine)
    instructions: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_GREATER_EQUAL, 0, 1, X32_BIT),
        (RETURN, 0, 0, FAIL | errno.ENOSYS),
    ]
    for numbers in DENIED.values():
        if (number := numbers[column]) != -1:
            instructions += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL | errno.EPERM)]
    instructions += [
        (JUMP_IF_EQUAL, 0, 1, LOOKED_AT["clone3"][column]),
        (RETURN, 0, 0, FAIL | errno.ENOSYS),
    ]
    namespaces = sum(NEW_NAMESPACES.values())
    families = (UNIX, INET, INET6) if internet_sockets else (UNIX,)
    instructions += _by_argument(LOOKED_AT["clone"][column], 0, [(JUMP_IF_ANY_BIT, namespaces)], denied=True)
    instructions += _by_argument(LOOKED_AT["socket"][column], 0, [(JUMP_IF_EQUAL, f) for f in families], denied=False)
    typing = [(JUMP_IF_EQUAL, request) for request in (TERMINAL_INPUT, TERMINAL_SELECTION)]
    instructions += _by_argument(LOOKED_AT["ioctl"][column], 1, typing, denied=True)
    return [*instructions, (RETURN, 0, 0, ALLOW)]


def _by_argument(number: int, argument: int, tests: list[tuple[int, int]], denied: bool) -> list[Instruction]:
    """Returns instructions that filter a call by its argument's lower 32 bits. With `denied` a matching test refuses
    the call, otherwise it allows it."""
    if_held, if_not = (FAIL | errno.EPERM, ALLOW) if denied else (ALLOW, FAIL | errno.EPERM)
    body: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)]
    for operation, operand in tests:
        body += [(operation, 0, 1, operand), (RETURN, 0, 0, if_held)]
    body += [(RETURN, 0, 0, if_not)]
    return [(JUMP_IF_EQUAL, 0, len(body), number), *body]


def as_bytes(instructions: list[Instruction]) -> bytes:
    """Returns the instructions as an array of the kernel's `struct sock_filter`."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def restrict_this_process(internet_sockets: bool) -> None:
    """Installs the filter for this process and all its children. Needs no_new_privs. Raises OSError if the kernel has
    no filters or the processor is unknown."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(f"no system calls are known for processors of type {machine}; expected {[*ARCHITECTURES]}")
    code = as_bytes(program(machine, internet_sockets))
    filter_mode = 2
    process_control(PR_SET_SECCOMP, filter_mode, ctypes.byref(_Program(len(code) // 8, code)))

"""A seccomp filter in classic BPF, written out by hand so that confinement needs no further library.

It refuses what a test run never needs and an escape might: new namespaces, mounts, tracing and
reading other processes' memory, kernel keyrings, bpf, io_uring. Everything else is allowed; the
namespaces, the uid and the limits do the rest (`envs.sandbox`).
"""

from __future__ import annotations

import errno
import platform
import struct

_CLONE_NEWUSER = 0x10000000
_CLONE, _CLONE3 = "clone", "clone3"

# AUDIT_ARCH value and system-call numbers: Linux, arch/x86/entry/syscalls and asm-generic/unistd.h.
_ARCHITECTURES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {"mount": 165, "umount2": 166, "pivot_root": 155, "ptrace": 101, "process_vm_readv": 310}
        | {"process_vm_writev": 311, "unshare": 272, "setns": 308, _CLONE: 56, "keyctl": 250}
        | {"add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323}
        | {"kexec_load": 246, "open_by_handle_at": 304},
    ),
    "aarch64": (
        0xC00000B7,
        {"mount": 40, "umount2": 39, "pivot_root": 41, "ptrace": 117, "process_vm_readv": 270}
        | {"process_vm_writev": 271, "unshare": 97, "setns": 268, _CLONE: 220, "keyctl": 219}
        | {"add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282}
        | {"kexec_load": 104, "open_by_handle_at": 265},
    ),
}
_EVERYWHERE = {_CLONE3: 435, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430}
_EVERYWHERE |= {"fsmount": 432, "pidfd_getfd": 438, "mount_setattr": 442}

# struct seccomp_data { int nr; u32 arch; u64 instruction_pointer; u64 args[6]; }
_NR, _ARCH, _ARG0 = 0, 4, 16
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_SET, _JUMP_IF_GE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def program() -> bytes | None:
    """The filter for this machine's architecture, or None where its numbers are not known here."""
    if platform.machine() not in _ARCHITECTURES:
        return None
    arch, numbers = _ARCHITECTURES[platform.machine()]
    ops = [
        _op(_LOAD, _ARCH),
        _op(_JUMP_IF_EQUAL, arch, if_true=1),
        _op(_RETURN, _KILL),  # another ABI has other numbers
        _op(_LOAD, _NR),
        _op(_JUMP_IF_GE, _X32_BIT, if_false=1),
        _op(_RETURN, _KILL),
    ]
    for name, number in (numbers | _EVERYWHERE).items():
        if name == _CLONE:
            continue
        # clone3 hides its flags behind a pointer: say it does not exist, and libc falls back to clone.
        refusal = errno.ENOSYS if name == _CLONE3 else errno.EPERM
        ops += [_op(_JUMP_IF_EQUAL, number, if_false=1), _op(_RETURN, _ERRNO | refusal)]
    ops += [
        _op(_JUMP_IF_EQUAL, numbers[_CLONE], if_false=3),
        _op(_LOAD, _ARG0),
        _op(_JUMP_IF_SET, _CLONE_NEWUSER, if_false=1),
        _op(_RETURN, _ERRNO | errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]
    return b"".join(ops)

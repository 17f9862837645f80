// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// NewSealed makes a memfd that can neither shrink nor grow, and maps it. No process can remove
// pages that another one has mapped. With ownerOnly a process that receives the descriptor cannot
// write to the memory; the mapping that NewSealed returns is writable.
func NewSealed(name string, size uint64, ownerOnly bool) (fd int, mem []byte, err error) {
	return newSealed(name, size, ownerOnly, func(fd int) ([]byte, error) {
		return unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}, unix.Munmap)
}

// NewSealedPool is NewSealed with ownerOnly for a size that is a multiple of the page size. The
// pages are there when it returns, huge ones where the kernel gives them, so that a lack of memory
// is an error. The mapping begins at a multiple of 2 MiB; Unmap ends it.
func NewSealedPool(name string, size uint64) (fd int, mem []byte, err error) {
	// While populate takes more than there is, the kernel ends processes.
	if _, available := memoryLimits("/"); available != 0 && size > available {
		return -1, nil, tooLittle(size, available)
	}
	return newSealed(name, size, true, func(fd int) ([]byte, error) {
		mem, err := mapAligned(fd, size, unix.PROT_READ|unix.PROT_WRITE)
		if err != nil {
			return nil, err
		}
		if _, err := populate(mem, &layer{fd: fd}, 0, true); err != nil {
			return nil, errors.Join(err, Unmap(mem))
		}
		return mem, nil
	}, Unmap)
}

// mapAligned maps a descriptor at a multiple of 2 MiB, so that its huge pages are mapped as such.
func mapAligned(fd int, size uint64, prot int) ([]byte, error) {
	mem, err := Reserve(size, HugeSize)
	if err != nil {
		return nil, err
	}
	if err := place(mem, fd, 0, prot); err != nil {
		return nil, errors.Join(err, Unmap(mem))
	}
	return mem, nil
}

// newSealed maps before it seals: the seal of ownerOnly refuses later mappings that could write.
func newSealed(name string, size uint64, ownerOnly bool, mmap func(fd int) ([]byte, error),
	munmap func([]byte) error) (fd int, mem []byte, err error) {
	fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, nil, fmt.Errorf("create %s: %w", name, os.NewSyscallError("memfd_create", err))
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		mem, err = mmap(fd)
	}
	if err != nil {
		return -1, nil, errors.Join(fmt.Errorf("map %s: %w", name, err), unix.Close(fd))
	}
	seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	if ownerOnly {
		seals |= unix.F_SEAL_FUTURE_WRITE
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return -1, nil, errors.Join(fmt.Errorf("seal %s: %w", name, err), munmap(mem),
			unix.Close(fd))
	}
	return fd, mem, nil
}

// CheckSealed returns an error unless the file of a received descriptor has at least need bytes and
// cannot shrink. Otherwise an access to its mapping could end this process with SIGBUS.
func CheckSealed(fd int, need uint64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("examine peer's descriptor: %w", err)
	}
	if st.Size < 0 || uint64(st.Size) < need {
		return fmt.Errorf("peer's descriptor has %d of %d bytes: %w", st.Size, need,
			driver.ErrCorrupt)
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return fmt.Errorf("peer's descriptor can shrink (seals %#x): seal memory that is shared "+
			"with F_SEAL_SHRINK: %w", seals, driver.ErrCorrupt)
	}
	return nil
}

// MapSealed maps the memfd of a peer, which may be hostile, after it has checked that the peer
// cannot remove its pages.
func MapSealed(fd int, size uint64, prot int) ([]byte, error) {
	if err := checkPages(fd, size); err != nil {
		return nil, err
	}
	mem, err := unix.Mmap(fd, 0, int(size), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map peer's page: %w", os.NewSyscallError("mmap", err))
	}
	return mem, nil
}

// MapSealedPool maps what another process has made by NewSealedPool, to read it; Unmap ends that.
func MapSealedPool(fd int, size uint64) ([]byte, error) {
	if err := checkPages(fd, size); err != nil {
		return nil, err
	}
	mem, err := mapAligned(fd, size, unix.PROT_READ)
	if err != nil {
		return nil, fmt.Errorf("map peer's pool: %w", err)
	}
	FaultIn(mem, false, 1)
	return mem, nil
}

func checkPages(fd int, size uint64) error {
	if err := CheckSealed(fd, size); err != nil {
		return err
	}
	// The peer could punch holes into reserved huge pages and take all free ones: the next access
	// would have no page.
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil || fs.Type == unix.HUGETLBFS_MAGIC {
		return fmt.Errorf("peer's descriptor is of huge pages (%v): %w", err, driver.ErrCorrupt)
	}
	return nil
}

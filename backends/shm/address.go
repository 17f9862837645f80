// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// address is what Addr says: the version, the uid of the owner, the number of its network
// namespace (0: not known), 8 bytes that name this backend, and the directory of the socket if
// it has one. It is text, "shm6:1000:4026531840:0011223344556677:/run/sluice",
// since people meet it in messages.
type address struct {
	uid uint32
	net uint64
	id  session.Owner
	dir string
}

func newAddress(dir string) address {
	return address{uid: uint32(os.Getuid()), net: networkNamespace(), id: session.NewOwner(),
		dir: dir}
}

// networkNamespace is the number of this process's, as `ls -l /proc/self/ns/net` prints it; 0
// where the kernel does not say.
func networkNamespace() uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/net", &st) != nil {
		return 0
	}
	return st.Ino
}

func (a *address) encode() []byte {
	return fmt.Appendf(nil, "shm%d:%d:%d:%x:%s", version, a.uid, a.net, a.id, a.dir)
}

func decodeAddress(b []byte) (a address, err error) {
	if len(b) > driver.AddrMax {
		return a, fmt.Errorf("shm address of %d bytes: %w", len(b), driver.ErrCorrupt)
	}
	fields := strings.SplitN(string(b), ":", 5)
	if len(fields) < 4 || !strings.HasPrefix(fields[0], "shm") {
		return a, fmt.Errorf("%q is no shm address: %w", b, driver.ErrCorrupt)
	}
	if fields[0] != fmt.Sprintf("shm%d", version) {
		return a, fmt.Errorf("shm address of version %q, ours is %d: use the same release on "+
			"both sides: %w",
			fields[0][3:], version, driver.ErrVersion)
	}
	if len(fields) != 5 {
		return a, fmt.Errorf("%q is no shm address: %w", b, driver.ErrCorrupt)
	}
	uid, err := strconv.ParseUint(fields[1], 10, 32)
	if err != nil {
		return a, fmt.Errorf("shm address of user %q: %w", fields[1], driver.ErrCorrupt)
	}
	if a.net, err = strconv.ParseUint(fields[2], 10, 64); err != nil {
		return a, fmt.Errorf("shm address of network namespace %q: %w", fields[2],
			driver.ErrCorrupt)
	}
	id, err := hex.DecodeString(fields[3])
	if err != nil || len(id) != len(a.id) {
		return a, fmt.Errorf("shm address names no backend: %w", driver.ErrCorrupt)
	}
	a.uid, a.dir = uint32(uid), fields[4]
	copy(a.id[:], id)
	return a, nil
}

// socket returns the name to listen and dial on; "@" is net's way to write an
// abstract name.
func (a *address) socket() string {
	name := "sluice-" + hex.EncodeToString(a.id[:])
	if a.dir == "" {
		return "@" + name
	}
	return filepath.Join(a.dir, name)
}

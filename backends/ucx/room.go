// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// UCX's transport posix keeps the queues of workers in files of this directory.
const (
	shmDir     = "/dev/shm"
	shmRoomMin = 16 << 20
)

// roomIn returns how many bytes a directory has room for.
func roomIn(dir string) uint64 {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil {
		return 0
	}
	return s.Bavail * uint64(s.Bsize)
}

// explainRoom names a directory that is too small as the cause of UCX not opening: UCX itself
// speaks of resources.
func explainRoom(err error, dir string) error {
	var missing *driver.UnavailableError
	room := roomIn(dir)
	if !errors.As(err, &missing) || room >= shmRoomMin {
		return err
	}
	return &driver.UnavailableError{
		Backend: missing.Backend,
		Reason: fmt.Sprintf("%s; %s, where UCX keeps its queues, has room for %d KiB",
			missing.Reason, dir, room>>10),
		Fix: fmt.Sprintf("mount -o remount,size=1g %s; containers: --shm-size=1g", dir),
	}
}

// SPDX-License-Identifier: Apache-2.0

package files

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// visited is shared memory that counts who is inside.
type visited struct {
	driver.Shared
	inside int // guarded by Core.Mu
}

func (s *visited) TryEnter() bool { s.inside++; return true }
func (s *visited) Leave()         { s.inside-- }

// TestNoDescriptorHoldsNoMemory: a batch whose file cannot be opened without O_DIRECT fails, and
// the memory that a read was to go to may be renewed. The next batch may succeed.
func TestNoDescriptorHoldsNoMemory(t *testing.T) {
	r, s := newRig(t), &visited{}
	m := r.register(driver.Segment{Kind: driver.DRAM, Len: 100, Mem: make([]byte, 100), Shared: s})
	f := r.file.(*Memory).File
	fd := f.FD
	f.FD = -1 // as of a file with O_DIRECT, whose other descriptor is closed
	d := driver.Desc{Remote: 7, Len: 10, LocalKey: m.Key(), RemoteKey: r.key}
	for i, op := range []driver.Op{driver.Read, driver.Write, driver.Read} {
		if i == 2 {
			f.FD = fd
		}
		require.NoError(t, r.p.Submit(1, &driver.Batch{Op: op, Descs: []driver.Desc{d}}))
		r.letGo()
		ended := r.ended()
		require.Len(t, ended, 1)
		if i == 2 {
			require.NoError(t, ended[0].Err)
		} else {
			require.ErrorIs(t, ended[0].Err, unix.ENOENT)
			var at *driver.PieceError
			require.ErrorAs(t, ended[0].Err, &at)
			require.Zero(t, at.Piece)
			var of *driver.FileError
			require.ErrorAs(t, at.Err, &of)
			require.Equal(t, op.String(), of.Op)
			require.EqualValues(t, 7, of.Off)
		}
		require.Zero(t, s.inside)
	}
}

// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// TestWriter writes through the page cache, more pieces than the table holds: short ones do not go
// to the ring, a long one does, all are in the file, and nobody is left to write when nothing is.
func TestWriter(t *testing.T) {
	const size, entry, count = 1 << 20, 656, 600
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, Config{Path: PathRing, Buffered: true, Depth: 16}, fileSegment(f, size), size)
	g := r.b.ring
	for i := range r.mem {
		r.mem[i] = byte(i * 7)
	}
	want := make([]byte, size)
	var descs []driver.Desc
	for i := range uint64(count) {
		d := driver.Desc{Local: i * entry, Remote: (count - i) * 1000, Len: entry,
			LocalKey: r.local, RemoteKey: r.remote}
		copy(want[d.Remote:], r.mem[d.Local:][:d.Len])
		descs = append(descs, d)
	}
	before := g.sq.tail.Load()
	r.write(t, descs)
	require.Zero(t, g.sq.tail.Load()-before, "short writes went to the ring")
	long := driver.Desc{Remote: size - 100_000, Len: 100_000, LocalKey: r.local,
		RemoteKey: r.remote}
	copy(want[long.Remote:], r.mem[:long.Len])
	r.write(t, []driver.Desc{long})
	require.EqualValues(t, 1, g.sq.tail.Load()-before, "a long write became requests of the ring")
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(got, want), "the file does not hold what was written")
	g.writers.Wait() // they end by themselves
}

// write sleeps until a batch has ended, and polls only then.
func (r *rig) write(t *testing.T, descs []driver.Desc) {
	t.Helper()
	require.NoError(t, r.p.Submit(1, &driver.Batch{Op: driver.Write, Descs: descs}))
	for end := time.Now().Add(20 * time.Second); ; {
		ready, err := r.b.Arm()
		require.NoError(t, err)
		if !ready {
			poll := [1]unix.PollFd{{Fd: int32(r.b.FD()), Events: unix.POLLIN}}
			if n, err := unix.Poll(poll[:], 20_000); n == 0 && err == nil {
				t.Fatal("nobody was woken")
			}
			var drained [8]byte
			_, _ = unix.Read(r.b.FD(), drained[:])
		}
		n, err := r.b.Poll(r.done[:])
		if err != nil || n > 0 && r.done[0].Err != nil {
			t.Fatal(err, r.done[0].Err)
		}
		if n == 1 {
			return
		}
		require.False(t, time.Now().After(end), "no completion")
	}
}

// TestSleeperOfAWrite: a caller arms, and before it looks another one takes a landing of which the
// kernel has told already. What a writer does next wakes it all the same.
func TestSleeperOfAWrite(t *testing.T) {
	const size = 8192
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, Config{Path: PathRing}, fileSegment(f, size), size)
	g := r.b.ring
	var told [8]byte
	for ready := true; ready; {
		var err error
		ready, err = r.b.Arm()
		require.NoError(t, err)
	}
	require.NoError(t, r.p.Submit(1, &driver.Batch{Op: driver.Read, Descs: []driver.Desc{{Len: size,
		LocalKey: r.local, RemoteKey: r.remote}}}))
	for g.cq.tail.Load() == g.cq.head.Load() {
		runtime.Gosched()
	}
	poll := [1]unix.PollFd{{Fd: int32(r.b.FD()), Events: unix.POLLIN}}
	_, err := unix.Poll(poll[:], 20_000)
	require.NoError(t, err)
	_, err = unix.Read(r.b.FD(), told[:])
	require.NoError(t, err)

	testpoint.First("posix: armed", func() {
		n, err := r.b.Poll(r.done[:])
		if n != 1 || err != nil {
			t.Error(n, err)
		}
	})
	defer testpoint.First("posix: armed", nil)
	for ready := true; ready; {
		ready, err = r.b.Arm()
		require.NoError(t, err)
	}
	require.NoError(t, r.p.Submit(2, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{Len: 700,
		LocalKey: r.local, RemoteKey: r.remote}}}))
	n, err := unix.Poll(poll[:], 20_000)
	require.NoError(t, err)
	require.Equal(t, 1, n, "nobody was woken")
}

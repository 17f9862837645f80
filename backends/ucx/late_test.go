// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const lateBytes = 4096

// shortGrace makes the tests of silence quick.
const shortGrace = 600 * time.Millisecond

// TestTimedPausesLoseNothing stops a peer, for longer than Grace and Failure, while writes to it
// wait. Its host answers, so it is not given up; when it goes on it asks whether the bytes are
// still wanted, and lands them.
func TestTimedPausesLoseNothing(t *testing.T) {
	t.Parallel()
	o := startOwner(t, onLoopback(Config{Grace: shortGrace, Failure: shortGrace}),
		onLoopback(Config{Grace: shortGrace}), (*exec.Cmd).Start)
	p, key := o.connect()
	for range 2 {
		o.freeze()
		o.write(p, key, 0, lateBytes)
		select {
		case <-p.Lost():
			t.Fatal("a peer was given up whose host answers")
		case <-time.After(4 * shortGrace):
		}
		o.thaw()
		require.NoError(t, o.outcome())
		require.Equal(t, lateBytes, o.landed())
	}
	require.NoError(t, p.Close())
}

// TestTimedNothingLandsAfterAForcedClose closes the connection to a peer that is stopped with bytes
// in its queue, with a Grace of its own that is equal, longer or shorter.
func TestTimedNothingLandsAfterAForcedClose(t *testing.T) {
	for name, grace := range map[string]time.Duration{"equal": shortGrace, "longer": 4 * shortGrace,
		"shorter": shortGrace / 4} {
		t.Run(name, func(t *testing.T) {
			o := startOwner(t, onLoopback(Config{Grace: shortGrace}),
				onLoopback(Config{Grace: grace}), (*exec.Cmd).Start)
			p, key := o.connect()
			o.freeze()
			o.write(p, key, 0, lateBytes)
			require.NoError(t, p.Close())
			require.ErrorIs(t, o.outcome(), driver.ErrClosed)
			o.thaw()
			o.settle(2 * lateBytes)
			o.keeps(1, "bytes of a batch that had ended landed")
		})
	}
}

// breakConnections ends all TCP connections of this process that lead to a port, as a reset does.
func breakConnections(t *testing.T) (n int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, f := range list {
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			continue
		}
		if _, err := unix.Getpeername(fd); err != nil {
			continue
		}
		domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if err == nil && domain == unix.AF_INET && unix.Shutdown(fd, unix.SHUT_RDWR) == nil {
			n++
		}
	}
	return n
}

// TestTimedNothingLandsAfterAReset breaks our own sockets while the peer is stopped with bytes in
// its queue, for less than Grace: that we lost it says nothing of what it lands.
func TestTimedNothingLandsAfterAReset(t *testing.T) {
	o := startOwner(t, onLoopback(Config{Grace: shortGrace}),
		onLoopback(Config{Grace: shortGrace}), (*exec.Cmd).Start)
	p, key := o.connect()
	o.freeze()
	o.write(p, key, 0, lateBytes)
	require.Positive(t, breakConnections(t))
	<-p.Lost()
	require.ErrorIs(t, o.outcome(), driver.ErrPeerLost)
	o.thaw()
	o.settle(2 * lateBytes)
	o.keeps(1, "bytes of a batch that had ended landed")
	require.NoError(t, p.Close())
}

// TestPagesThatDoNotCome writes from memory whose pages do not come, as those of a file on a server
// that is gone: that holds up the writer, and neither the owner nor its fence. What comes later
// does not land.
func TestPagesThatDoNotCome(t *testing.T) {
	testkit.CheckLeaks(t)
	o := startOwner(t, onLoopback(Config{}), onLoopback(Config{Grace: graceMax}), (*exec.Cmd).Start)
	p, key := o.connect()
	o.write(p, key, 0, ownerBytes)
	require.NoError(t, o.outcome())
	require.Equal(t, ownerBytes, o.landed())

	mem, err := unix.Mmap(-1, 0, 128<<10, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	late, err := testkit.WithholdPages(mem)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	m, err := o.b.Register(driver.Segment{Kind: driver.DRAM, Len: uint64(len(mem)), Mem: mem,
		Secret: [16]byte{3}})
	require.NoError(t, err)
	o.tag++
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.Submit(o.tag, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{{
			Len: uint64(len(mem)), LocalKey: m.Key(), RemoteKey: key}}})
	}()
	defer late.Supply(t)
	late.Await(t)
	o.fence()
	late.Supply(t)
	require.NoError(t, <-submitted)
	require.Error(t, o.outcome())
	o.fence() // the owner has handled what came before
	o.keeps(ownerBytes, "zeros landed behind the fence")
	require.NoError(t, m.Revoke(t.Context()))
	require.NoError(t, p.Close())
}

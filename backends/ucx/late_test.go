// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

const lateBytes = 4096

// shortGrace makes the tests of silence quick.
const shortGrace = 600 * time.Millisecond

// TestTimedPausesLoseNothing stops a peer, for longer than Grace and Failure, while writes to it
// wait. Its host answers, so it is not given up; when it goes on it asks whether the bytes are
// still wanted, and lands them.
func TestTimedPausesLoseNothing(t *testing.T) {
	t.Parallel()
	o := startOwner(t, Config{Grace: shortGrace, Failure: shortGrace}, shortGrace)
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
			o := startOwner(t, Config{Grace: shortGrace},
				grace)
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
	o := startOwner(t, Config{Grace: shortGrace}, shortGrace)
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

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

// overBoth runs a test with an owner whose thread lands the bytes, near and far.
func overBoth(t *testing.T, f func(t *testing.T, list string)) {
	for _, list := range []string{"posix,sysv,cma,self", "posix,sysv,self", "tcp"} {
		t.Run(list, func(t *testing.T) {
			t.Parallel()
			f(t, list)
		})
	}
}

// TestTimedIdlePeerMayBeSilent stops a peer that nothing waits for for far longer than Grace.
func TestTimedIdlePeerMayBeSilent(t *testing.T) {
	overBoth(t, func(t *testing.T, list string) {
		o := startOwner(t, Config{Transports: list, Devices: "lo"}, 0)
		p, key := o.connect()
		o.freeze()
		select {
		case <-p.Lost():
			t.Fatal("a peer that nothing waits for was given up")
		case <-time.After(5 * time.Second):
		}
		o.thaw()
		o.write(p, key, 0, lateBytes)
		require.NoError(t, o.outcome())
		require.Equal(t, lateBytes, o.landed())
	})
}

// TestTimedWriteSurvivesASilence submits to a peer that is silent for longer than Grace: when it
// goes on it asks whether the bytes are still wanted, and lands them.
func TestTimedWriteSurvivesASilence(t *testing.T) {
	overBoth(t, func(t *testing.T, list string) {
		o := startOwner(t, Config{Transports: list, Devices: "lo", Grace: shortGrace}, shortGrace)
		p, key := o.connect()
		o.freeze()
		o.write(p, key, 0, lateBytes)
		select {
		case <-p.Lost():
			t.Fatal("a peer was given up before Failure")
		case <-time.After(2 * shortGrace):
		}
		o.thaw()
		require.NoError(t, o.outcome())
		require.Equal(t, lateBytes, o.landed())
	})
}

// TestTimedNothingLandsAfterAForcedClose closes the connection to a peer that is stopped with bytes
// in its queue, with a Grace of its own that is equal, longer or shorter.
func TestTimedNothingLandsAfterAForcedClose(t *testing.T) {
	for name, grace := range map[string]time.Duration{"equal": shortGrace, "longer": 4 * shortGrace,
		"shorter": shortGrace / 4} {
		t.Run(name, func(t *testing.T) {
			overBoth(t, func(t *testing.T, list string) {
				o := startOwner(t, Config{Transports: list, Devices: "lo", Grace: shortGrace},
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
	o := startOwner(t, Config{Transports: "tcp", Devices: "lo", Grace: shortGrace}, shortGrace)
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

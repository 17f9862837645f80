// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// sockets counts those of a process: an endpoint over TCP has at least one.
func sockets(t *testing.T, pid int) (n int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd/", pid)
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range list {
		if target, err := os.Readlink(dir + f.Name()); err == nil &&
			strings.HasPrefix(target, "socket:") {
			n++
		}
	}
	return n
}

// TestTimedPausesLoseNothing stops a peer by TCP, for longer than Failure, while writes to it wait:
// they land when it goes on.
func TestTimedPausesLoseNothing(t *testing.T) {
	o := startOwner(t, Config{Transports: "tcp", Devices: "lo", Grace: shortGrace,
		Failure: shortGrace}, shortGrace)
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

// TestSoakPausesLeaveNothing stops a near peer that something waits for until it is given up, has
// it go on, and connects anew, several times: neither process keeps more of the later pauses than
// of the first, and a fence works as before.
func TestSoakPausesLeaveNothing(t *testing.T) {
	o := startOwner(t, Config{Transports: NearTransports, Devices: "lo", Grace: shortGrace,
		Failure: shortGrace}, shortGrace)
	var ours, theirs int
	for round := range 4 {
		p, key := o.reach(0, lateBytes)
		o.freeze()
		o.write(p, key, 0, lateBytes)
		<-p.Lost()
		require.NoError(t, p.Close())
		require.ErrorIs(t, o.outcome(), driver.ErrPeerLost)
		o.thaw()
		o.settle(lateBytes)
		if round == 1 {
			ours, theirs = sockets(t, os.Getpid()), sockets(t, o.cmd.Process.Pid)
		}
	}
	eventually(t, "the sockets of earlier pauses are gone", func() bool {
		return sockets(t, os.Getpid()) <= ours && sockets(t, o.cmd.Process.Pid) <= theirs
	})
	o.fence()
}

// TestTimedPauseLeavesFencesQuick stops a near writer in the middle of its writing for longer than
// Grace and has it go on. A fence that then had to wait for something silent would wait for an
// hour: none does, on the connection that was stopped or on the next one, and each is proof.
func TestTimedPauseLeavesFencesQuick(t *testing.T) {
	for name, own := range map[string]bool{"direct": true, "served": false} {
		t.Run(name, func(t *testing.T) {
			leak.Check(t)
			b := openReal(t, Config{Transports: "posix,cma", Grace: shortGrace})
			defer func() { require.NoError(t, b.Close()) }()
			seg := memoryFor(t, b, own)
			b.cfg.FenceGrace = time.Hour
			m, err := b.Register(seg)
			require.NoError(t, err)
			w := startWriter(t, "posix,cma")
			for round := range 4 {
				w.write(b, m, "")
				eventually(t, "writes land", func() bool { return seg.Mem[writerBytes-1] == 255 })
				if round == 0 {
					w.freeze()
					time.Sleep(3 * shortGrace)
					w.thaw()
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				require.NoError(t, b.Fence(ctx, m.Key()), "round %d", round)
				cancel()
				clear(seg.Mem)
				require.Contains(t, w.outcome(), driver.ErrRevoked.Error(), "round %d", round)
				untouched(t, seg.Mem)
			}
			require.NoError(t, m.Close())
		})
	}
}

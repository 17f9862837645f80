// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestBlockedQueue has a process die while it fills a place in the queue of shared memory that
// all peers of this host share, and only then is the queue said to be blocked.
func TestBlockedQueue(t *testing.T) {
	w := ways[pulledWay]
	w.config.GraceNanos = uint64(200 * time.Millisecond)
	l := openLane(t, w)
	require.False(t, l.far.Blocked())
	f := startForger(t, w)
	f.tell("connect %x", l.far.Address(0))
	require.False(t, l.far.Blocked())
	_, _ = fmt.Fprintln(f.in, "die")
	for f.out.Scan() { // to the end of the process
	}
	require.True(t, l.far.Blocked())
	require.False(t, l.near.Blocked(), "the queue of another backend")
	l.far.Condemn()
	for _, c := range []*Context{l.far, l.near} {
		require.Equal(t, c == l.near, awaitLoss(t, c).Over,
			"only the peer of a condemned end knows that it is over")
	}
}

// TestSilenceIsSuspect has a peer say nothing: the queue may be the cause.
func TestSilenceIsSuspect(t *testing.T) {
	v := openVictim(t, ways[pulledWay])
	v.Elapse(2 * testGrace)
	m, _ := v.Control()
	require.True(t, m.Suspect)
	require.False(t, v.Blocked())
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestIdle leaves a connection alone for 500 times the Grace of its ends: they keep it alive, and
// it works as before.
func TestIdle(t *testing.T) {
	l := openLane(t, overTCP)
	for range 500 {
		for _, c := range []*Context{l.near, l.far} {
			c.Elapse(testGrace)
			for m, ok := c.Control(); ok; m, ok = c.Control() {
				require.False(t, m.Lost, "an idle peer was given up")
			}
		}
	}
	require.Eventually(t, func() bool { return max(l.conn.Sends(), l.back.Sends()) <= 2 },
		testLimit, time.Millisecond, "messages that UCX keeps")
	l.works(t)
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// burn writes over the stack that calls before it used.
//
//go:noinline
func burn(v byte) (sum byte) {
	var stack [32 << 10]byte
	for i := range stack {
		stack[i] = v
	}
	for _, x := range stack {
		sum += x
	}
	return sum
}

//go:noinline
func submitNest(c *Conn, tag uint64, p *driver.Pattern) error {
	return c.Submit(tag, &driver.Batch{Op: driver.Write, Pattern: p})
}

// TestRefusedNest has an owner refuse nested writes that were issued as a whole by the time Submit
// returned: what is told of them is not read from the caller's stack.
func TestRefusedNest(t *testing.T) {
	l := openLane(t, overTCP)
	p := &driver.Pattern{Count: 4, Run: 16, Local: driver.Side{Stride: 4096},
		Remote: driver.Side{Stride: 4096}, LocalKey: testKey, RemoteKey: l.slot,
		Loops: []driver.Loop{{N: 3, Local: 64, Remote: 64}}}
	require.NoError(t, l.far.Revoke(testKey, testLimit))
	for i := range 50 {
		burn(byte(i))
		require.NoError(t, submitNest(l.conn, uint64(i), p))
		burn(0)
		err := l.outcome(t, uint64(i))
		require.ErrorIs(t, err, driver.ErrRevoked)
	}
}

// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestStraggler has the network hold a write until its connection is closed, and an owner that does
// not answer: its queue pair takes the write then, and the outcome has said that this may be.
func TestStraggler(t *testing.T) {
	f, c, p, l, r, _ := openOneRail(t)
	owner := p.muffle(t)
	remote := p.imports(t, r)
	for i := range l.bytes {
		l.bytes[i] = 0xee
	}
	near, before := f.Device(0), bytes.Clone(r.bytes)
	owner.deaf.Store(true)
	near.ParkNext(1)
	tag := p.write(t, l, remote, nil)
	require.NoError(t, c.during(t, p.peer.Close))
	err := p.await(t, tag)
	near.LandParked(t, 1)
	require.False(t, bytes.Equal(before, r.bytes), "the write was lost")
	if !errors.Is(err, driver.ErrUnproven) {
		promise.Breaks(t, "a write landed after its end: %v", err)
	}
}

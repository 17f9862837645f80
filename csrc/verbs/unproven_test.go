// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestEndWithoutAProof ends a connection with requests under way. Where the peer has not said that
// its queue pairs are gone too, what is on its way to it may land: those batches say so, also one
// that was cancelled. What reads does not: our queue pair is gone.
func TestEndWithoutAProof(t *testing.T) {
	for _, proved := range []bool{false, true} {
		d := fakeDevices(t, 1)
		l := openLink(t, d, testShape{})
		d.fake.Device(0).Set(fakeverbs.Frozen, 1)
		unproven := map[uint64]bool{
			l.submit(t, driver.Write, nil, driver.Desc{Len: 4096}): !proved,
			l.submit(t, driver.Read, nil, driver.Desc{Len: 4096}):  false,
			l.submit(t, driver.Write, []byte("sent")):              !proved,
		}
		cancelled := l.submit(t, driver.Write, nil, driver.Desc{Len: 4096})
		unproven[cancelled] = !proved
		l.conn.Cancel(cancelled)
		require.NoError(t, l.conn.End(Closed, proved))
		for tag, err := range l.outcomes(t, len(unproven)) {
			if tag != cancelled || !proved {
				require.ErrorIs(t, err, driver.ErrClosed)
			}
			if errors.Is(err, driver.ErrUnproven) != unproven[tag] {
				promise.Breaks(t, "batch %d, proved %v: %v", tag, proved, err)
			}
		}
		l.close(t)
	}
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestTimedStagedFrozenPeer stops the other process with pieces in its hand. An abort ends in time
// and says what it cannot prove; memory of this side is free.
func TestTimedStagedFrozenPeer(t *testing.T) {
	for _, op := range []Op{Write, Read} {
		t.Run(op.String(), func(t *testing.T) {
			testkit.CheckLeaks(t, hostmem.InUse)
			e, hbm, b := near(t, Config{AbortGrace: 500 * time.Millisecond})
			f := startFar(t, e)
			tr := transfer(t, f.peer, op)
			check(t, tr.Add(hbm, 0, f.hbm, 0, hostBytes))
			run(t, tr)
			f.hold(t)
			check(t, tr.Post())
			f.expect(t, "has one in hand")
			check(t, testkit.Freeze(f.process))
			err := tr.Abort(within(t))
			switch {
			case op == Write && !errors.Is(err, ErrUnproven):
				t.Errorf("abort of a write that the peer may still place: %v", err)
			case op == Read && err != nil:
				t.Errorf("abort of a read: %v", err)
			}
			if !errors.Is(tr.Err(), ErrAborted) {
				t.Errorf("outcome %v", tr.Err())
			}
			before := bytes.Clone(b)
			check(t, testkit.Thaw(f.process))
			time.Sleep(50 * time.Millisecond)
			if !bytes.Equal(b, before) {
				testkit.ErrorBroken(t, "bytes have come here after the abort")
			}
			check(t, tr.Close())
			check(t, hbm.Close())
			check(t, f.peer.Close())
		})
	}
}

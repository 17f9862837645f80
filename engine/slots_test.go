// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSlots takes every slot that a configuration may have: each is taken once, finds its transfer
// by the tag of any batch, and is taken again once it is given back.
func TestSlots(t *testing.T) {
	var s slots
	s.init(transfersLimit)
	live := make([]Transfer, transfersLimit)
	for i := range live {
		if !s.take(&live[i]) {
			t.Fatalf("no slot after %d of %d", i, len(live))
		}
		slot, generation, bit := untag(tag(live[i].slot, s.renew(&live[i]), batchesInFlight-1))
		if slot != live[i].slot || generation != 1 || bit != batchesInFlight-1 {
			t.Fatalf("the tag of slot %d is for %d, %d, %d", live[i].slot, slot, generation, bit)
		}
		if s.get(slot) != &live[i] {
			t.Fatalf("slot %d has another transfer", slot)
		}
	}
	require.False(t, s.take(new(Transfer)), "one more than there are slots")
	s.give(&live[5])
	require.Nil(t, s.get(live[5].slot))
	require.True(t, s.take(&live[0]))
	require.Equal(t, live[5].slot, live[0].slot)
	require.EqualValues(t, 2, s.renew(&live[0]), "the generation of a slot only grows")
}

// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// countBytes is one piece: what a writer copies without looking at the generation.
const countBytes = 256 << 10

// counted is what the n-th write consists of.
func counted(n int) byte { return byte(n%250) + 1 }

// countAll writes one batch after another, each of another byte, and says how many
// it was told have arrived.
func countAll(b *Backend, p driver.Peer, mem []byte, from, to uint32) error {
	var done [1]driver.Completion
	for n := 1; ; n++ {
		copy(mem, bytes.Repeat([]byte{counted(n)}, countBytes))
		nextTag++
		err := p.Submit(nextTag, &driver.Batch{Op: driver.Write,
			Descs: []driver.Desc{{Len: countBytes, LocalKey: from, RemoteKey: to}}})
		for got := 0; err == nil && got == 0; {
			if got, err = b.Poll(done[:]); got > 0 {
				err = done[0].Err
			}
		}
		if err != nil {
			return fmt.Errorf("wrote %d: %w", n-1, err)
		}
	}
}

// TestTimedFrozenInMidPiece freezes a writer that stores into our memory itself, and puts
// fresh pages under it. The copy that it ends when it goes on is lost, so it must not
// believe that it arrived.
func TestTimedFrozenInMidPiece(t *testing.T) {
	leak.Check(t)
	const list = "posix,cma"
	b := openReal(t, Config{Transports: list, Grace: shortGrace, FenceGrace: 30 * time.Millisecond})
	defer b.Close()
	seg := memoryFor(t, b, true)
	w := startWriter(t, list)
	for round := range writerBytes / countBytes {
		seg, err := seg.Slice(uint64(round)*countBytes, countBytes, [16]byte{byte(round + 1)})
		require.NoError(t, err)
		m, err := b.Register(seg)
		require.NoError(t, err)
		w.write(b, m, "count")
		eventually(t, "writes land", func() bool {
			return seg.Mem[countBytes-1] > 2 || len(w.lines) > 0
		})
		w.freeze()
		require.NoError(t, b.Fence(t.Context(), m.Key()))
		w.thaw()
		outcome := w.outcome()
		var n int
		if _, err := fmt.Sscanf(outcome, "wrote %d", &n); err != nil ||
			!strings.Contains(outcome, driver.ErrRevoked.Error()) {
			t.Fatalf("round %d: the writer ended with %q", round, outcome)
		}
		for i, v := range seg.Mem {
			if v != counted(n) && v != counted(n+1) {
				promise.Broken(t, "round %d: the writer was told that write %d arrived: byte %d "+
					"is %d, want %d or of the next one", round, n, i, v, counted(n))
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

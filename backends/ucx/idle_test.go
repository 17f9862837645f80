// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// TestSoakIdle leaves a connection alone for many times the grace: the two ends keep it
// alive, and it works as before. TestIdle of csrc/ucx does so by a clock that it moves on.
func TestSoakIdle(t *testing.T) {
	const grace = 600 * time.Millisecond
	for name, list := range map[string]string{"near": "posix,cma", "tcp": "tcp"} {
		t.Run(name, func(t *testing.T) {
			leak.Check(t)
			far := openReal(t, Config{Transports: list, Devices: "lo", Grace: grace})
			near := openReal(t, Config{Transports: list, Devices: "lo", Grace: grace})
			defer far.Close()
			defer near.Close()
			p, err := near.Connect(t.Context(), far.Addr())
			require.NoError(t, err)
			time.Sleep(4 * grace)
			select {
			case <-p.Lost():
				t.Fatal("an idle peer was given up")
			default:
			}
			require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
				Notify: []byte("still here")}))
			var msgs []driver.Message
			eventually(t, "a message after the pause", func() bool {
				msgs = append(msgs, received(t, far)...)
				return len(msgs) > 0
			})
			if string(msgs[0].Data) != "still here" || msgs[0].Err != nil {
				t.Errorf("after the pause %q (%v) arrived", msgs[0].Data, msgs[0].Err)
			}
		})
	}
}

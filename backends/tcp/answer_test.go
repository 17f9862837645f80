// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// receive waits for the next message of a backend.
func receive(tb testing.TB, b *Backend) driver.Message {
	tb.Helper()
	var msgs [1]driver.Message
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Microsecond) {
		n, err := b.Receive(msgs[:])
		require.NoError(tb, err)
		if n == 1 {
			return msgs[0]
		}
	}
	require.Fail(tb, "no message arrives")
	return driver.Message{}
}

// drain has the owner receive what its peers sent. A connection that ends may have a last word, or
// none where the owner had not yet read that the peer's program has it.
func drain(tb testing.TB, b *Backend) {
	tb.Helper()
	var msgs [8]driver.Message
	_, err := b.Receive(msgs[:])
	require.NoError(tb, err)
}

// notify sends a message and waits until it is on its way.
func notify(tb testing.TB, p *peer, text string) {
	tb.Helper()
	msg := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: []byte(text)}
	require.NoError(tb, p.Submit(1, msg))
	require.NoError(tb, await(tb, p.b, 1))
}

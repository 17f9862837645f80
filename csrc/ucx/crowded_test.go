// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// TestAnswersThatAreNotTaken: a peer that asks for bytes and takes none is given up, and what UCX
// keeps for it until then is bounded by bytes.
func TestAnswersThatAreNotTaken(t *testing.T) {
	const answer, kept = 64 << 10, 8 << 20
	buf, err := hostmem.Alloc(answer, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, buf.Close()) })
	v := openVictim(t)
	require.NoError(t, v.Map(30, Memory{Mem: buf.Bytes(), Ticket: 1}))
	require.True(t, v.answers())
	v.f.tell("quiet")
	most := 0
	for seq := range uint32(1000) {
		v.f.send(forged{kind: msgRead, conn: v.conn.ID(), ticket: 1, key: 30, size: answer,
			seq: seq}, nil)
		most = max(most, v.conn.Sends())
	}
	awaitLoss(t, v.Context)
	require.LessOrEqual(t, most, kept/answer+8, "answers that UCX keeps")
}

// TestControlIsNotTaken: control messages to a peer that takes none are refused, and not kept
// without an end.
func TestControlIsNotTaken(t *testing.T) {
	const most = 20000
	v := openVictim(t)
	require.True(t, v.answers())
	v.f.tell("quiet")
	var err error
	sent := 0
	for ; err == nil && sent < most; sent++ {
		err = v.conn.Control(make([]byte, ControlMax))
	}
	require.ErrorIs(t, err, driver.ErrFull, "%d were kept", sent)
}

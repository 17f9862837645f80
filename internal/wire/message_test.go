// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestHello comes back, and nothing that is too short, too long or of another kind does.
func TestHello(t *testing.T) {
	h := Hello{ID: ID{1, 2}, Show: Secret{3}, Name: "decode-0"}
	b := h.Append(nil)
	got, ok := ParseHello(b)
	require.True(t, ok)
	require.Equal(t, h, got)
	h.Name = strings.Repeat("n", NameMax+1)
	for _, bad := range [][]byte{nil, b[:helloBytes-1], append([]byte{KindPart}, b[1:]...),
		append([]byte{KindHello, helloVersion + 1}, b[2:]...), h.Append(nil)} {
		_, ok = ParseHello(bad)
		require.False(t, ok, "%x", bad)
	}
}

// TestOutcomes encodes each error and decodes it again.
func TestOutcomes(t *testing.T) {
	for _, want := range outcomes {
		got := ParseOutcome(AppendOutcome(nil, want))
		require.ErrorIs(t, got, want)
		if want != nil {
			require.EqualError(t, got, want.Error())
		}
	}
	require.Equal(t, driver.ErrBounds, outcomes[OutOfBounds])
	long := ParseOutcome(AppendOutcome(nil, errors.New(string(make([]byte, 5000)))))
	require.ErrorIs(t, long, errFar)
	require.Len(t, long.Error(), textMax)
	for _, b := range [][]byte{nil, {200}, make([]byte, 2+textMax)} {
		require.ErrorIs(t, ParseOutcome(b), driver.ErrCorrupt)
	}
}

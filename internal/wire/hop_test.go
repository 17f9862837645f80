// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestLists brings what one side lists to the other.
func TestLists(t *testing.T) {
	list := make([]byte, ListBytes)
	descs := []driver.Desc{{Local: 7, Remote: 1000, Len: 10}, {Local: 9, Remote: 5, Len: 1}}
	h := Hop{Token: make([]byte, HopToken)}
	require.EqualValues(t, 32, h.ListDescs(list, descs))
	var got Hop
	require.NoError(t, got.Parse(h.Append(nil)))
	back, _, err := got.ReadList(list, nil, nil)
	require.NoError(t, err)
	require.Equal(t, []driver.Desc{{Local: 0, Remote: 1000, Len: 10}, {Local: 10, Remote: 5,
		Len: 1}}, back)

	p := driver.Pattern{Run: 656, Count: 3, Remote: driver.Side{Base: 4, Stride: 700,
		List: []uint32{2, 0, 9}}}
	require.EqualValues(t, 12, h.ListEntries(list, &p))
	require.NoError(t, got.Parse(h.Append(nil)))
	_, indices, err := got.ReadList(list, nil, nil)
	require.NoError(t, err)
	require.Equal(t, p.Remote.List, indices)
	require.Equal(t, []uint64{656, 4, 700}, []uint64{got.EntryLen, got.Base, got.Stride})
}

// TestListIsReadOnce changes a list while it is read: no piece leaves the slot, and no entry the
// memory. The second is the Transfer's work, on the copy.
func TestListIsReadOnce(t *testing.T) {
	list := make([]byte, ListBytes)
	for _, lens := range [][]uint64{{PieceBytes + 1}, {1, PieceBytes}, {1 << 63, 1 << 63}, {0}} {
		for i, n := range lens {
			binary.LittleEndian.PutUint64(list[descBytes*i+8:], n)
		}
		h := Hop{Count: len(lens)}
		_, _, err := h.ReadList(list, nil, nil)
		require.ErrorIs(t, err, driver.ErrBounds, "pieces of %d bytes", lens)
	}
}

// FuzzHop has what was parsed stay within a slot, and come back the same.
func FuzzHop(f *testing.F) {
	h := Hop{Slot: 2, Number: 3, Token: make([]byte, HopToken), Count: 4}
	f.Add(h.Append(nil), uint64(1))
	h.Paged, h.Listed, h.Count, h.EntryLen, h.Stride = true, true, 5, 656, 656
	f.Add(h.Append(nil), uint64(2))
	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		var h Hop
		if h.Parse(b) != nil {
			return
		}
		require.Equal(t, b, h.Append(nil))
		list := make([]byte, ListBytes)
		r := rand.NewPCG(seed, 1)
		for i := 0; i < len(list); i += 8 {
			binary.LittleEndian.PutUint64(list[i:], r.Uint64()>>(r.Uint64()%64))
		}
		descs, indices, err := h.ReadList(list, nil, nil)
		if err != nil {
			return
		}
		sum := uint64(0)
		for _, d := range descs {
			sum += d.Len
		}
		if h.Paged {
			sum = uint64(h.Count) * h.EntryLen
		}
		require.LessOrEqual(t, sum, uint64(PieceBytes))
		require.LessOrEqual(t, len(indices), h.Count)
	})
}

// TestRequestsAreBounded by what a slot holds, before the list is looked at.
func TestRequestsAreBounded(t *testing.T) {
	ok := Hop{Token: make([]byte, HopToken), Count: DescsMax}
	require.NoError(t, new(Hop).Parse(ok.Append(nil)))
	for name, h := range map[string]Hop{
		"descriptors": {Count: DescsMax + 1},
		"indices":     {Paged: true, Listed: true, Count: IndicesMax + 1, EntryLen: 1},
		"entries":     {Paged: true, Count: PieceBytes/656 + 1, EntryLen: 656},
	} {
		h.Token = ok.Token
		require.ErrorIs(t, new(Hop).Parse(h.Append(nil)), driver.ErrBounds, name)
	}
}

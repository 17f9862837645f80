// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Offer is what a Loop needs to reach the memory of another.
type Offer struct {
	Address []byte `json:"address"`
	Rkey    []byte `json:"rkey"`
	Base    uint64 `json:"base"`
	Len     uint64 `json:"len"`
}

// Batch is a list of descriptors that a Loop has checked, once: the loop
// itself is to cost nothing but the calls of UCX.
type Batch struct {
	descs  []driver.Desc
	loop   *Loop
	window int
}

// newBatch checks that each piece is within two memories of that many bytes. At
// most window pieces will be under way at once.
func newBatch(l *Loop, descs []driver.Desc, window int, local, remote uint64) (*Batch,
	error) {
	if len(descs) == 0 || window < 1 {
		return nil, fmt.Errorf("%d pieces, %d at once: %w", len(descs), window, driver.ErrBounds)
	}
	for i, d := range descs {
		if d.Local > local || d.Len > local-d.Local || d.Remote > remote ||
			d.Len > remote-d.Remote {
			return nil, &driver.PieceError{Piece: i, Err: driver.ErrBounds}
		}
	}
	return &Batch{descs: descs, loop: l, window: window}, nil
}

// SPDX-License-Identifier: Apache-2.0

package ucx

import "github.com/sluicehq/sluice/driver"

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

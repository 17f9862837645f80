// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"strings"

	"github.com/sluicehq/sluice/engine"
)

// aboutPeer is what sluice_peer_about says.
type aboutPeer struct {
	Name       string        `json:"name"`
	Origin     string        `json:"origin"`
	SameHost   bool          `json:"same_host"`
	MessageMax int           `json:"message_max"`
	Regions    []aboutRegion `json:"regions"`
}

type aboutRegion struct {
	Name     string `json:"name"`
	Kind     string `json:"kind"`
	Length   uint64 `json:"length"`
	ReadOnly bool   `json:"read_only"`
}

// about lists the regions that are still there when their turn comes.
func about(p *engine.Peer) aboutPeer {
	a := aboutPeer{Name: p.Name(), Origin: p.Origin(), SameHost: p.SameHost(),
		MessageMax: p.MessageMax(), Regions: []aboutRegion{}}
	for _, name := range p.Remotes() {
		m, err := p.Remote(name)
		if err != nil {
			continue
		}
		kind := strings.ToLower(m.Kind().String())
		a.Regions = append(a.Regions, aboutRegion{m.Name(), kind, m.Size(), m.ReadOnly()})
	}
	return a
}

//export slgoPeerAbout
func slgoPeerAbout(h C.uint64_t, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return handJSON(about(p.p), buffer, capacity, length, f)
}

// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"github.com/sluicehq/sluice/internal/keys"
	"sync"
)

// registry knows the open backends of this process: of those of another one the
// kernel tells the end, of ours it does not.
var registry = backendsHere{open: make(map[keys.Owner]struct{})}

type backendsHere struct {
	mu   sync.Mutex
	open map[keys.Owner]struct{}
}

func (r *backendsHere) add(id keys.Owner) {
	r.mu.Lock()
	r.open[id] = struct{}{}
	r.mu.Unlock()
}

func (r *backendsHere) remove(id keys.Owner) {
	r.mu.Lock()
	delete(r.open, id)
	r.mu.Unlock()
}

func (r *backendsHere) has(id keys.Owner) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.open[id]
	return ok
}

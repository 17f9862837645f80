// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"crypto/rand"
	"crypto/sha256"
	"os"
	"sync"

	"github.com/sluicehq/sluice/internal/wire"
)

// hostID is the same in every process that runs under this kernel since its
// start. Whether two of them can really share memory (namespaces may part them)
// is found out by connecting.
var hostID = sync.OnceValue(func() (id wire.ID) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		rand.Read(id[:]) // unknown: then no other engine is on this host
		return id
	}
	sum := sha256.Sum256(append([]byte("sluice host "), boot...))
	copy(id[:], sum[:])
	return id
})

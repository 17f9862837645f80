// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"testing"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// misreporter is mem, which does not count, with counts that are wrong.
type misreporter struct {
	*mem.Backend
	says inbound
}

func (b *misreporter) Inbound(uint64) (written, read uint64, counted bool) {
	return b.says.Written, b.says.Read, b.says.Counted
}

// TestMisreports proves that the check of Inbound can fail.
func TestMisreports(t *testing.T) {
	for name, says := range map[string]inbound{
		"counts what it says that it does not": {Written: 1},
		"counts nothing":                       {Counted: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := sabotaged(sabotage{})
			h.New = func() (driver.Backend, error) {
				b, err := mem.New(mem.Config{BatchesMax: 64})
				return &misreporter{b, says}, err
			}
			notices(t, find(t, "Inbound"), h, Pair)
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/replay"
)

// faultBytesMax bounds a file of rules.
const faultBytesMax = 1 << 20

// rules reads --fault, and says which side has which rules. Each child reads them once
// more, so they go as text.
func (f *replayFlags) rules(ctx context.Context) (map[replay.Side]string, error) {
	sides, ok := map[string][]replay.Side{
		"both":    {replay.PrefillSide, replay.DecodeSide},
		"prefill": {replay.PrefillSide}, "decode": {replay.DecodeSide},
	}[f.faultSide]
	if !ok {
		return nil, usagef("--fault-side %q: want both, prefill or decode", f.faultSide)
	}
	if f.faults == "" && f.faultSide != "both" {
		return nil, usagef("--fault-side %s without --fault: there is no rule to be for that side",
			f.faultSide)
	}
	if f.faults == "" {
		return nil, nil
	}
	text := f.faults
	if name, ok := strings.CutPrefix(text, "@"); ok {
		file, err := readInput(ctx, name, faultBytesMax+1)
		if err == nil && len(file) > faultBytesMax {
			err = fmt.Errorf("%s has more than %d bytes", name, faultBytesMax)
		}
		if err != nil {
			return nil, fmt.Errorf("read fault rules: %w", err)
		}
		text = string(file)
	}
	rules, err := fault.Parse(text)
	if err != nil {
		return nil, &usageError{fmt.Errorf("--fault: %w", err)}
	}
	if len(rules.List) == 0 {
		return nil, usagef("--fault %q: there is no rule in it", f.faults)
	}
	list := map[replay.Side]string{}
	for _, s := range sides {
		list[s] = rules.String()
	}
	return list, nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import "time"

// What the commands of keys print with --json.
type (
	initOutput struct {
		Authority  string    `json:"authority"`
		KeyID      string    `json:"key_id"` // tells two authorities of one name apart
		ValidUntil time.Time `json:"valid_until"`
		Cert       string    `json:"cert"` // files
		Key        string    `json:"key"`
	}
	issueOutput struct {
		Name       string    `json:"name"`
		Hosts      []string  `json:"hosts"`
		Serial     string    `json:"serial"`
		Replaced   string    `json:"replaced_serial,omitempty"` // stays valid until it is revoked
		ValidUntil time.Time `json:"valid_until"`
		Cert       string    `json:"cert"` // files
		Key        string    `json:"key"`
		CA         string    `json:"ca"`
	}
	revokeOutput struct {
		Serial string `json:"serial"` // empty: the list was signed, and no number added
		List   string `json:"list"`   // file
	}
)

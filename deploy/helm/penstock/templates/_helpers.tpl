{{- define "penstock.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 50 characters, so that suffixes fit into a name of 63. */}}
{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "penstock.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "penstock.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "penstock.headless" -}}
{{- include "penstock.fullname" . }}-headless
{{- end -}}

{{- define "penstock.selectorLabels" -}}
app.kubernetes.io/name: {{ include "penstock.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "penstock.selectorLabels" . }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "penstock.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* The labels of the pods that serve. */}}
{{- define "penstock.serverLabels" -}}
{{ include "penstock.selectorLabels" . }}
{{- if include "penstock.hasHosts" . }}
app.kubernetes.io/component: leader
{{- end }}
{{- end -}}

{{- define "penstock.kind" -}}
{{- if include "penstock.hasHosts" . -}}LeaderWorkerSet
{{- else -}}{{ ternary "StatefulSet" "Deployment" .Values.modelCache.persistence.enabled }}
{{- end -}}
{{- end -}}

{{/* LeaderWorkerSet's controller makes a Service with the name of the workload, so it has another name than ours. */}}
{{- define "penstock.workload" -}}
{{- include "penstock.fullname" . }}{{ if include "penstock.hasHosts" . }}-hosts{{ end }}
{{- end -}}

{{/* What autoscalers scale. */}}
{{- define "penstock.scaleTarget" -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (ne "" (include "penstock.hasHosts" .)) }}
kind: {{ include "penstock.kind" . }}
name: {{ include "penstock.workload" . }}
{{- end -}}

{{/* The time that the startup probe allows. */}}
{{- define "penstock.startupSeconds" -}}
{{- mul (int .Values.probes.startup.periodSeconds) (int .Values.probes.startup.failureThreshold) -}}
{{- end -}}

{{- define "penstock.adminAddress" -}}
127.0.0.1:{{ add (int .Values.ports.grpc) 1 }}
{{- end -}}

{{- define "penstock.isAutoscaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}true{{- end -}}
{{- end -}}

{{/* The names of Secrets; empty if there is none. */}}
{{- define "penstock.apiKeysSecret" -}}
{{- if .Values.apiKeys.secret -}}{{ .Values.apiKeys.secret }}
{{- else if .Values.apiKeys.content -}}{{ include "penstock.fullname" . }}-keys
{{- end -}}
{{- end -}}

{{- define "penstock.tenantsSecret" -}}
{{- if .Values.tenants.secret -}}{{ .Values.tenants.secret }}
{{- else if .Values.tenants.content -}}{{ include "penstock.fullname" . }}-tenants
{{- end -}}
{{- end -}}

{{- define "penstock.operatorSecret" -}}
{{- if .Values.shutdown.preStop.enabled -}}{{ .Values.shutdown.preStop.operatorKey.secret }}{{- end -}}
{{- end -}}

{{/* Names under which clients in the cluster reach the Services, and those of http.allowedHosts. */}}
{{- define "penstock.allowedHosts" -}}
{{- $hosts := list -}}
{{- range $name := list (include "penstock.fullname" .) (include "penstock.headless" .) -}}
{{- $namespaced := printf "%s.%s" $name $.Release.Namespace -}}
{{- $hosts = concat $hosts (list $namespaced (printf "%s.svc" $namespaced) (printf "%s.svc.%s" $namespaced $.Values.clusterDomain)) -}}
{{- end -}}
{{- concat $hosts .Values.http.allowedHosts | join "," -}}
{{- end -}}

{{/* The time from the deletion of a pod to SIGKILL: everything that a pod may take, and a reserve of 15 s. */}}
{{- define "penstock.terminationGracePeriodSeconds" -}}
{{- $shutdown := .Values.shutdown -}}
{{- $seconds := add (int $shutdown.drainDelaySeconds) (int $shutdown.graceSeconds) 15 -}}
{{- if .Values.http.enabled -}}{{- $seconds = add $seconds 10 -}}{{- end -}}
{{- if $shutdown.preStop.enabled -}}
{{- $seconds = add $seconds (int $shutdown.drainDelaySeconds) (int $shutdown.preStop.waitSeconds) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}

{{/* The gateway's container gets SIGTERM after the drain delay, so its responses have as long as the service's requests. */}}
{{- define "penstock.gatewayGraceSeconds" -}}
{{- $shutdown := .Values.shutdown -}}
{{- add (int $shutdown.graceSeconds) (ternary (int $shutdown.preStop.waitSeconds) 0 $shutdown.preStop.enabled) | min 86400 -}}
{{- end -}}

{{/* Values that are valid by themselves but not together. */}}
{{- define "penstock.check" -}}
{{- $v := .Values -}}
{{- $hasKeys := or (include "penstock.apiKeysSecret" .) (hasKey $v.flags "jwt-jwks-url") (hasKey $v.flags "jwt-jwks-file") -}}
{{- if and $v.autoscaling.hpa.enabled $v.autoscaling.keda.enabled -}}
{{- fail "autoscaling: KEDA creates an HPA itself; enable hpa or keda, not both" -}}
{{- end -}}
{{- if and (include "penstock.isAutoscaled" .) (lt (int $v.autoscaling.maxReplicas) (int $v.autoscaling.minReplicas)) -}}
{{- fail "autoscaling: maxReplicas is less than minReplicas" -}}
{{- end -}}
{{- if and $v.autoscaling.hpa.enabled (not $v.autoscaling.hpa.cpuUtilization) (not $v.autoscaling.hpa.podMetrics) -}}
{{- fail "autoscaling.hpa: set cpuUtilization or podMetrics" -}}
{{- end -}}
{{- if and $v.autoscaling.keda.enabled (not $v.autoscaling.keda.prometheusAddress) -}}
{{- fail "autoscaling.keda: set prometheusAddress" -}}
{{- end -}}
{{- if and $v.modelCache.persistence.enabled $v.modelCache.existingClaim -}}
{{- fail "modelCache: set existingClaim or persistence.enabled, not both" -}}
{{- end -}}
{{- if and $v.apiKeys.secret $v.apiKeys.content -}}
{{- fail "apiKeys: set secret or content, not both" -}}
{{- end -}}
{{- if and $v.tenants.secret $v.tenants.content -}}
{{- fail "tenants: set secret or content, not both" -}}
{{- end -}}
{{- if and $v.tls.clientCA (not $v.tls.secret) -}}
{{- fail "tls.clientCA: set tls.secret too" -}}
{{- end -}}
{{- if and $v.http.container.enabled (not $v.http.enabled) -}}
{{- fail "http.container: set http.enabled too" -}}
{{- end -}}
{{- if and $v.http.container.enabled $v.tls.clientCA -}}
{{- fail "http.container: the gateway's container has no client certificate; set http.container.enabled or tls.clientCA, not both" -}}
{{- end -}}
{{- if and $v.http.container.enabled $v.tls.secret (not $v.tls.serverName) -}}
{{- fail "http.container: set tls.serverName to a name in the certificate" -}}
{{- end -}}
{{- if and $v.http.enabled $v.tls.clientCA (not $hasKeys) -}}
{{- fail "tls.clientCA: HTTP clients show no certificate; set apiKeys or flags.jwt-jwks-url too, or disable http" -}}
{{- end -}}
{{- if and $v.shutdown.preStop.enabled $hasKeys (not $v.shutdown.preStop.operatorKey.secret) -}}
{{- fail "shutdown.preStop: with API keys or tokens, draining needs a key with the right admin; set operatorKey.secret" -}}
{{- end -}}
{{- if and $v.llmd.inferencePool.enabled (not $v.http.enabled) -}}
{{- fail "llmd.inferencePool: the pool sends requests over HTTP; set http.enabled too" -}}
{{- end -}}
{{- if and $v.llmd.inferencePool.enabled $v.tls.secret -}}
{{- fail "llmd.inferencePool: the pool sends requests without TLS; leave tls.secret empty, and end TLS at the gateway" -}}
{{- end -}}
{{- if and $v.llmd.inferencePool.enabled (not $v.llmd.inferencePool.endpointPicker.name) -}}
{{- fail "llmd.inferencePool: set endpointPicker.name" -}}
{{- end -}}
{{- include "penstock.checkHosts" . -}}
{{- $ports := list (int $v.ports.grpc) (add (int $v.ports.grpc) 1 | int) (int $v.ports.metrics) -}}
{{- if $v.http.enabled -}}{{- $ports = append $ports (int $v.http.port) -}}{{- end -}}
{{- if include "penstock.hasHosts" . -}}{{- $ports = append $ports (int $v.hosts.port) -}}{{- end -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- fail (printf "ports: gRPC, administration (the next port), metrics, HTTP and hosts.port need different ports; they are %v" $ports) -}}
{{- end -}}
{{- end -}}
